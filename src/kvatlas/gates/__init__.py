"""`kvatlas gate`: did a change cost answers? Two sides on the same problems, and one verdict.

The files in the order in which they are read: `gate.py` (which reader reads a side, then pairs and verdict),
`outcomes.py` (what a side is), `cards.py` (what may have changed its answers, and how that is compared), `pairing.py`
(which answers belong together), `judgement.py` (what they prove), `gate_result.py` (sentences and data) and
`gate_page.py` (page and figure). Beside them the readers of sides: `lm_eval_logs.py`, `runs.py` (our runs, Inspect's
logs and files of answers) and `endpoints.py`. `verification.py` is `kvatlas deploy verify`.
"""
