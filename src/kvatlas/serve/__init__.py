"""One engine for many clients at once: an answer is the same whatever else is asked (HTTP server, Inspect, lm-eval)."""
