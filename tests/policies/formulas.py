"""Slow readings of the papers' formulas: float64, one token at a time, other code than the policies'.

Each takes a policy and a cache and gives a score of one token, as `tests.policies.scenes.expected` takes it.
"""

import cmath
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kvatlas.noise import uniform
from kvatlas.policies import CacheView, Scope
from tests.policies.scenes import Score, places


def position(cached: CacheView, layer: int, head: int, slot: int) -> int:
    layers, heads, _ = cached.positions.shape
    return int(cached.positions[min(layer, layers - 1), min(head, heads - 1), slot])


def grouping(cached: CacheView) -> int:
    """Query heads that share a KV head."""
    return cached.model.shape.heads // cached.model.shape.kv_heads


def logit(cached: CacheView, layer: int, head: int, query: int, slot: int) -> float:
    """q k of query head `head` times the layer's scaling, in float64; -inf for a token that the query does not see."""
    vectors = cached.query(layer)[head].double()
    back = cached.length - len(vectors) + query - position(cached, layer, head // grouping(cached), slot)
    if not 0 <= back < (cached.window(layer) or math.inf):
        return -math.inf
    key = cached.key(layer)[head // grouping(cached), slot].double()
    return float(vectors[query] @ key) * cached.scaling(layer)


def softmax(values: list[float]) -> list[float]:
    top = max(values)
    if top == -math.inf:
        # Of nothing.
        return [0.0] * len(values)
    parts = [math.exp(value - top) for value in values]
    total = sum(parts)
    return [part / total for part in parts]


def weights(cached: CacheView, layer: int, head: int, queries: int, slots: Iterable[int]) -> list[list[float]]:
    """Attention weights of one query head, by query, among these slots."""
    return [softmax([logit(cached, layer, head, query, slot) for slot in slots]) for query in range(queries)]


def mean(values: list[list[float]]) -> list[float]:
    return [sum(column) / len(column) for column in zip(*values, strict=True)]


def in_window(cached: CacheView, layer: int, head: int, slot: int, queries: int) -> bool:
    return position(cached, layer, head, slot) >= cached.length - queries


def neighbours(slot: int, kernel: int, count: int) -> range:
    return range(max(0, slot - kernel // 2), min(count, slot - kernel // 2 + kernel))


def uniform_of(cached: CacheView, at: int, choice: int) -> float:
    item = torch.tensor([at])
    return float(uniform(torch.tensor([cached.stream]), cached.length, item, torch.tensor([choice])))


def window(policy: Any, cached: CacheView) -> Score:
    return position


def streaming(policy: Any, cached: CacheView) -> Score:
    def score(cached: CacheView, layer: int, head: int, slot: int) -> float:
        at = position(cached, layer, head, slot)
        return math.inf if at < policy.sinks else at

    return score


def sepllm(policy: Any, cached: CacheView) -> Score:
    texts = [cached.model.tokenizer.decode([token]) for token in cached.tokens().tolist()]
    separators = [text != "" and all(letter in ".,?!;: \t\n" for letter in text) for text in texts]

    def score(cached: CacheView, layer: int, head: int, slot: int) -> float:
        at = position(cached, layer, head, slot)
        return math.inf if at < policy.sinks else at + len(texts) * separators[at]

    return score


def random(policy: Any, cached: CacheView) -> Score:
    """`random` and `dynts-random`: choices are numbered from 1 over layers and heads."""
    layers, heads, _ = cached.positions.shape

    def score(cached: CacheView, layer: int, head: int, slot: int) -> float:
        choice = min(layer, layers - 1) * heads + min(head, heads - 1) + 1
        return uniform_of(cached, position(cached, layer, head, slot), choice)

    return score


def snapkv(policy: Any, cached: CacheView) -> Score:
    queries, kernel, group, count = policy.queries, policy.kernel, grouping(cached), cached.positions.shape[-1]

    @cache
    def votes(layer: int, head: int) -> list[float]:
        """Sum over the observation window's queries of their softmax, before the window; of one query head."""
        rows = weights(cached, layer, head, queries, range(count))
        return [
            0.0 if in_window(cached, layer, head // group, slot, queries) else sum(row[slot] for row in rows)
            for slot in range(count)
        ]

    def score(cached: CacheView, layer: int, head: int, slot: int) -> float:
        if in_window(cached, layer, head, slot, queries):
            return math.inf
        total = 0.0
        for query_head in range(head * group, (head + 1) * group):
            near = [votes(layer, query_head)[i] for i in neighbours(slot, kernel, count)]
            total += max(near) if policy.pooling == "max" else sum(near) / kernel
        return total / group

    return score


def rkv(policy: Any, cached: CacheView) -> Score:
    queries, group = policy.queries, grouping(cached)

    @cache
    def importance(layer: int, head: int) -> list[float]:
        slots = range(cached.positions.shape[-1])
        past = [slot for slot in slots if not in_window(cached, layer, head, slot, queries)]
        rows = []
        for q in range(queries):
            best = [max(logit(cached, layer, head * group + g, q, slot) for g in range(group)) for slot in past]
            rows.append(dict(zip(past, softmax(best), strict=True)))
        average = [sum(row.get(slot, 0.0) for row in rows) / queries for slot in slots]
        return [max(average[i] for i in neighbours(slot, policy.kernel, len(average))) for slot in slots]

    @cache
    def redundancy(layer: int, head: int) -> list[float]:
        keys = cached.key(layer)[head].double()
        count = len(keys)
        unit = [key / key.norm() for key in keys]
        total = [0.0] * count
        for i in range(count):
            similar = [0.0 if i == j else float(unit[i] @ unit[j]) for j in range(count)]
            repeats = [j for j in range(count) if similar[j] > policy.threshold]
            if repeats or policy.unlike == "first":
                similar[max(repeats, default=0)] = 0.0
            total = [before + now for before, now in zip(total, similar, strict=True)]
        return softmax([value / count for value in total])

    def score(cached: CacheView, layer: int, head: int, slot: int) -> float:
        if in_window(cached, layer, head, slot, queries):
            return math.inf
        return policy.mix * importance(layer, head)[slot] - (1 - policy.mix) * redundancy(layer, head)[slot]

    return score


def tova(policy: Any, cached: CacheView) -> Score:
    group, shape = grouping(cached), cached.model.shape

    @cache
    def newest(layer: int, head: int) -> list[float]:
        return weights(cached, layer, head, 1, range(cached.positions.shape[-1]))[0]

    def score(cached: CacheView, layer: int, head: int, slot: int) -> float:
        heads = range(shape.heads) if policy.scope is Scope.LAYER else range(head * group, (head + 1) * group)
        return sum(newest(layer, head)[slot] for head in heads) / len(heads)

    return score


def keydiff(policy: Any, cached: CacheView) -> Score:
    @cache
    def anchor(layer: int, head: int) -> Any:
        keys = cached.key(layer)[head].double()
        return sum(key / key.norm() for key in keys) / len(keys)

    def score(cached: CacheView, layer: int, head: int, slot: int) -> float:
        key, towards = cached.key(layer)[head, slot].double(), anchor(layer, head)
        return -float(key @ towards) / float(key.norm() * towards.norm())

    return score


def knorm(policy: Any, cached: CacheView) -> Score:
    def score(cached: CacheView, layer: int, head: int, slot: int) -> float:
        return -math.sqrt(sum(channel * channel for channel in cached.key(layer)[head, slot].double().tolist()))

    return score


def lagkv(policy: Any, cached: CacheView) -> Score:
    lag = policy.budget.window
    count = cached.positions.shape[-1]

    def information(states: Tensor, partition: list[int], reference: list[int]) -> list[float]:
        numbers = states.double().tolist()
        deviations = []
        for slot in partition:
            relative = []
            for channel, number in enumerate(numbers[slot]):
                lag_numbers = [numbers[other][channel] for other in reference]
                relative.append((number - min(lag_numbers)) / (max(lag_numbers) - min(lag_numbers)))
            deviations.append(statistics.stdev(relative))
        return softmax(deviations)

    @cache
    def of_head(layer: int, head: int) -> list[float]:
        scores = [math.inf] * count
        slots = [slot for slot in range(count) if position(cached, layer, head, slot) >= policy.sinks]
        reference = slots[-lag:]
        left = slots[:-lag]
        while left:
            partition = left[-lag:]
            keys = information(cached.key(layer)[head], partition, reference)
            values = information(cached.value(layer)[head], partition, reference)
            total = {slot: a + b for slot, a, b in zip(partition, keys, values, strict=True)}
            for place, slot in enumerate(sorted(partition, key=lambda slot: -total[slot])):
                scores[slot] = 1 - (place + 0.5) / len(partition)
            reference = partition
            left = left[:-lag]
        return scores

    return lambda cached, layer, head, slot: of_head(layer, head)[slot]


def lazyeviction(policy: Any, cached: CacheView, attention: Tensor) -> Score:
    """From attention weights [steps after the prompt, layers, heads, tokens]."""
    layers, heads, total = attention.shape[1:]
    prompt = total - len(attention)

    def score(cached: CacheView, layer: int, head: int, slot: int) -> float:
        at = position(cached, layer, head, slot)
        row = attention[:, min(layer, layers - 1), min(head, heads - 1), at].tolist()
        times = [prompt - 1 if at < prompt else at - 1]
        times += [step for step in range(max(prompt, at), total) if row[step - prompt] >= policy.alpha]
        pause = max((b - a for a, b in pairwise(times)), default=0)
        waited = (total - 1 - times[-1]) / (pause + 1e-5)
        recent = 0.0 if waited > 700 else 2 / (1 + math.exp(1 + waited))
        # exp(pause - 1) leaves the range of floats where the share is 0 to their precision.
        return recent + (2 / (1 + math.exp(min(pause - 1, 700))) if pause else 0.0)

    return score


def vase(policy: Any, cached: CacheView) -> Score:
    group, shape = grouping(cached), cached.model.shape
    layers, heads, count = cached.positions.shape

    def attention(layer: int, head: int) -> list[float]:
        past = [slot for slot in range(count) if not in_window(cached, layer, head, slot, policy.queries)]
        total = [0.0] * count
        for query_head in range(head * group, (head + 1) * group):
            rows = weights(cached, layer, query_head, policy.queries, past)
            for slot, weight in zip(past, mean(rows), strict=True):
                total[slot] += weight / group
        return [sum(total[i] for i in neighbours(slot, policy.kernel, count)) / policy.kernel for slot in range(count)]

    def ranges(layer: int, head: int) -> list[float]:
        return [float(value.max() - value.min()) for value in cached.value(layer)[head].double()]

    @cache
    def of_choice(layer: int, head: int) -> list[float]:
        shared = [
            (a, b)
            for a in (range(shape.layers) if layers == 1 else [layer])
            for b in (range(shape.kv_heads) if heads == 1 else [head])
        ]
        weight = mean([attention(a, b) for a, b in shared])
        size = mean([ranges(a, b) for a, b in shared])
        at = cached.positions[layer, head].tolist()
        certain, room = places(policy, at, cached.prompt_length)
        free = [slot for slot in range(count - policy.budget.window) if slot not in certain]
        largest = sorted(free, key=lambda slot: (at[slot] < policy.sinks, size[slot]), reverse=True)
        drawn = {
            slot: math.log(weight[slot]) - math.log(-math.log(uniform_of(cached, at[slot], layer * heads + head + 1)))
            for slot in free
        }
        return [
            math.inf if slot not in drawn or slot in largest[: int(policy.large * room + 1e-9)] else drawn[slot]
            for slot in range(count)
        ]

    def score(cached: CacheView, layer: int, head: int, slot: int) -> float:
        return of_choice(min(layer, layers - 1), min(head, heads - 1))[slot]

    return score


def triattention(policy: Any, cached: CacheView, calibrated: Mapping[str, Tensor]) -> Score:
    """The sums over planes and future distances of section 4, on keys whose rotation is undone first."""
    group, count = grouping(cached), cached.positions.shape[-1]
    center = torch.complex(calibrated["center_real"], calibrated["center_imag"]).tolist()
    norm, frequency = calibrated["norm"].tolist(), calibrated["frequency"].tolist()
    planes = len(frequency)
    distances = [2**step for step in range(policy.reach.bit_length())]

    @cache
    def of_head(layer: int, head: int) -> list[float]:
        results = []
        for slot in range(count):
            at = position(cached, layer, head // group, slot)
            key = cached.key(layer)[head // group, slot].double().tolist()
            total = 0.0
            for f, w in enumerate(frequency):
                k = complex(key[f], key[f + planes]) * cmath.exp(-1j * at * w)
                q = center[layer][head][f]
                phi = cmath.phase(q) - cmath.phase(k)
                near = sum(math.cos(w * (cached.length - at + d) + phi) for d in distances) / len(distances)
                total += abs(q) * abs(k) * near + (norm[layer][head][f] - abs(q)) * abs(k)
            results.append(total)
        written = [
            value
            for slot, value in enumerate(results)
            if position(cached, layer, head // group, slot) >= cached.prompt_length
        ]
        average = sum(written) / len(written)
        deviation = math.sqrt(sum((value - average) ** 2 for value in written) / len(written))
        return [(value - average) / deviation for value in results]

    def score(cached: CacheView, layer: int, head: int, slot: int) -> float:
        return max(of_head(layer, item)[slot] for item in range(head * group, (head + 1) * group))

    return score


def dynts(policy: Any, cached: CacheView, importance: Sequence[float]) -> Score:
    """`dynts` and its ablations, from the importance of every token by its position."""

    def score(cached: CacheView, layer: int, head: int, slot: int) -> float:
        at = position(cached, layer, head, slot)
        in_prompt = at < cached.prompt_length
        if policy.name == "dynts-noprompt":
            return 0.0 if in_prompt else importance[at]
        if policy.name == "dynts-bottom":
            return -math.inf if in_prompt else -importance[at]
        return importance[at]

    return score


def attention_of_head(cached: CacheView, layer: int, head: int, queries: int) -> list[list[float]]:
    """Weights of one query head by query, with those of all cached tokens that it sees."""
    return weights(cached, layer, head, queries, range(cached.positions.shape[-1]))


def caote(policy: Any, cached: CacheView) -> Score:
    group = grouping(cached)

    @cache
    def of_head(layer: int, head: int) -> list[float]:
        rows = []
        for query_head in range(head * group, (head + 1) * group):
            rows += attention_of_head(cached, layer, query_head, policy.queries)
        weight = mean(rows)
        values = cached.value(layer)[head].double()
        output = sum(p * value for p, value in zip(weight, values, strict=True))
        changes = []
        for p, value in zip(weight, values, strict=True):
            bounded = min(max(p, 1e-6), 1 - 1e-6)
            changes.append(bounded / (1 - bounded) * float((output - value).norm()))
        return changes

    return lambda cached, layer, head, slot: of_head(layer, head)[slot]


def dropkv(policy: Any, cached: CacheView) -> Score:
    """The squared error of each query's output, computed again without the token."""
    group = grouping(cached)

    @cache
    def of_head(layer: int, head: int) -> list[float]:
        values = cached.value(layer)[head].double()
        total = [0.0] * len(values)
        for query_head in range(head * group, (head + 1) * group):
            for row in attention_of_head(cached, layer, query_head, policy.queries):
                weight = torch.tensor(row, dtype=torch.double)
                output = weight @ values
                for slot, p in enumerate(row):
                    without = weight.clone()
                    without[slot] = 0.0
                    error = without @ values / (1 - min(p, 1 - 1e-6)) - output
                    total[slot] += float(error.square().sum()) / group
        return total

    return lambda cached, layer, head, slot: of_head(layer, head)[slot]


def expected_attention(policy: Any, cached: CacheView, frequency: Sequence[float]) -> Score:
    """Mean and covariance of unrotated queries, turned by the mean of the rotation matrices, as matrices."""
    group, size = grouping(cached), cached.model.shape.head_dim
    count = cached.positions.shape[-1]

    def rotation(at: float) -> Tensor:
        matrix = torch.zeros(size, size, dtype=torch.double)
        for plane, step in enumerate(frequency):
            other = plane + size // 2
            matrix[plane, plane] = matrix[other, other] = math.cos(step * at)
            matrix[other, plane] = math.sin(step * at)
            matrix[plane, other] = -math.sin(step * at)
        return matrix

    future = sum(rotation(cached.length + step) for step in range(policy.future)) / policy.future

    @cache
    def weight_of_head(layer: int, query_head: int) -> list[float]:
        rotated = cached.query(layer)[query_head].double()
        first = cached.length - len(rotated)
        plain = torch.stack([rotation(first + i).T @ query for i, query in enumerate(rotated)])
        mu = future @ plain.mean(0)
        sigma = future @ torch.cov(plain.T, correction=0) @ future.T
        exponents = []
        for slot in range(count):
            key = cached.key(layer)[query_head // group, slot].double() * cached.scaling(layer)
            is_sink = position(cached, layer, query_head // group, slot) < policy.sinks
            exponents.append(-math.inf if is_sink else float(mu @ key + key @ sigma @ key / 2))
        return softmax(exponents)

    def score(cached: CacheView, layer: int, head: int, slot: int) -> float:
        if position(cached, layer, head, slot) < policy.sinks:
            return math.inf
        heads = range(head * group, (head + 1) * group)
        weight = sum(weight_of_head(layer, query_head)[slot] for query_head in heads) / group
        return weight * float(cached.value(layer)[head, slot].double().norm())

    return score


def h2o_per_query(policy: Any, cached: CacheView, mass: Tensor) -> Score:
    """The mean weight over the queries that saw a token, from sums [layers, heads, cached]."""
    layers, heads, _ = mass.shape

    def score(cached: CacheView, layer: int, head: int, slot: int) -> float:
        total = float(mass[min(layer, layers - 1), min(head, heads - 1), slot])
        return total / len(range(position(cached, layer, head, slot), cached.length))

    return score


def learned(cached: CacheView, scorer: Mapping[str, Tensor], frequency: Sequence[float]) -> Score:
    """An MLP of the key, turned back to position 0, and the value."""

    def score(cached: CacheView, layer: int, head: int, slot: int) -> float:
        key = cached.key(layer)[head, slot].double().tolist()
        half = len(key) // 2
        at = position(cached, layer, head, slot)
        turned = [complex(key[i], key[half + i]) * cmath.exp(-1j * at * frequency[i]) for i in range(half)]
        inputs = [plane.real for plane in turned] + [plane.imag for plane in turned]
        inputs += cached.value(layer)[head, slot].double().tolist()
        total = float(scorer["second_bias"][layer, head])
        for unit in range(scorer["first"].shape[-1]):
            column = scorer["first"][layer, head, :, unit].tolist()
            x = sum(a * b for a, b in zip(inputs, column, strict=True)) + float(scorer["first_bias"][layer, head, unit])
            total += float(scorer["second"][layer, head, unit]) * x * 0.5 * (1 + math.erf(x / math.sqrt(2)))
        return total

    return score
