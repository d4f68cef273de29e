"""Training of the heads that policies score tokens with, and statistics of queries, all from a model's own traces.

Read `training` (the DynTS head, and what it learns: the attention of the answer), `kv_heads` (the heads of `learned`),
`learning` (traces, labels, training and evaluation in a work folder), `calibration` (queries, for triattention),
`predictor_commands`.
"""
