"""Do policies choose on a real model's activations what other people's code, or their formula, chooses?

Run on demand by `make conformance`; `bench/results/conformance.json` holds the last result on SmolLM2-135M-Instruct.
"""
