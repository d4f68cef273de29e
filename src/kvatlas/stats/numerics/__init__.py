"""The statistical methods, on plain arrays: numpy and scipy alone, nothing of runs, cells and settings.

Read in this order:

- `arrays`: types, differences, weights of problems in benchmarks, p-values of several claims;
- `bounded`: the limits and p-values of values, differences and losses;
- `units`: problems or traces as the units of a claim, and missing pairs;
- `looks`: limits at early looks, and of runs that were extended;
- `against_reference`: many settings against the full cache, and which are proven to keep a margin;
- `planning`: what a number of problems can prove, and how many are needed;
- `levels`: do several settings, or the levels of an axis, behave alike;
- `equal_memory`: local windows that keep the same number of tokens;
- `averages`: maps of which only averages are known;
- `texts`: texts of an endpoint beside those of a cell.
"""
