"""Autopsies of lost answers: which evicted tokens, put back within the budget, restore the right answer.

Read `kinds_of_death` (rules that tell how an answer died), `lost_answers` (by cell, as data and as a table),
`autopsies` (the file of a run), `search` (one autopsy), `driver` (those of a cell, in one batch), `summary` (with the
test of the causes, and what the app shows), `autopsy_command`.
"""
