"""A task of lm-eval on a file of questions and answers, as YAML text."""

TASK = """
task: chain_local
dataset_path: json
dataset_kwargs: {{data_files: {data}}}
test_split: train
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["<|end|>"], max_gen_toks: {tokens}, do_sample: true, temperature: {temperature}}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


def task_text(data: object, tokens: int, temperature: float, rest: str = "") -> str:
    """Return the task on the file `data`, with at most so many new `tokens`; `rest` are further keys."""
    return TASK.format(data=data, tokens=tokens, temperature=temperature) + rest
