"""One engine for many clients of the HTTP server; answers do not depend on other requests."""
