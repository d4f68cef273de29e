"""`lazyeviction`: tokens that are due for attention again stay, by their longest pause so far (LazyEviction)."""

from dataclasses import dataclass

from kvatlas.policies import CacheView, CompressingPolicy, Scope, Signal, Step, Tensor, float_param, scope_param


@dataclass(frozen=True)
class LazyEviction(CompressingPolicy):
    """Recurrence: score(t) = 2 / (1 + exp(1 + (now - T) / M)) + [M > 0] 2 / (1 + exp(M - 1)).

    Source: arXiv 2506.15969, section 4, in the form of the authors' code. T is the last step at which t was attended to
    with a weight of at least `alpha`, M its longest pause between two such steps (maximum recurrence interval); M gets
    1e-5 added in the first term. Prompt tokens start with T at the end of the prompt, a new token with T one step
    before its own, both with M = 0. Weights are means over the query heads of a KV head. The paper evicts every W steps
    and keeps the last W tokens: here kv_budget and local_window say so, and the ratio replaces its budget.

    alpha: the least attention weight that counts.
    scope: the unit of one choice: head (published), layer or global, then with the mean of the weights.
    """

    alpha: float = float_param(0.0005, 1e-12, 1)
    scope: Scope = scope_param(Scope.HEAD)

    name = "lazyeviction"
    summary = "keeps the tokens that are due to be attended to again, by their longest pause so far"
    paper = "LazyEviction, arXiv 2506.15969"
    published = {"alpha": "0.0005 for R1-Llama on MATH (authors' script)", "local_window": "27 to 95"}
    observes = frozenset({Signal.ATTENTION})
    columns = ("last", "interval")

    def observe(self, step: Step) -> None:
        assert step.attention is not None
        if step.prompt_length is not None:
            step.enter("last", step.positions.new_full(step.positions.shape, step.prompt_length - 1))
            return
        now = step.positions
        step.enter("last", now - 1)
        attended = step.attention >= self.alpha
        last = step.read("last")
        now = now[:, :, None, None].to(last.dtype)
        step.write("interval", step.read("interval").maximum((now - last) * attended))
        step.write("last", last.where(~attended, now))

    def score(self, cached: CacheView) -> Tensor:
        last = cached.columns["last"].double()
        interval = cached.columns["interval"].double()
        waited = (cached.length - 1 - last) / (interval + 1e-5)
        return 2 * (-1 - waited).sigmoid() + (interval > 0) * 2 * (1 - interval).sigmoid()
