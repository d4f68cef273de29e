"""`kvatlas gate`: did a change cost answers? Two sides on the same problems, and one verdict.

The files in the order in which they are read: `answers.py` (what a side is), its readers `lm_eval_logs.py`,
`tables.py`, `runs.py` (our runs and Inspect's logs) and `endpoints.py`, `sides.py` (which reader reads what),
`pairs.py` (which answers belong together), `verdicts.py` (what they prove), `result.py`, then `words.py`, `figures.py`,
`pages.py`, and `gate.py`, which does all of it.
"""
