"""One engine for many clients (HTTP server, Inspect, lm-eval); answers do not depend on other requests."""
