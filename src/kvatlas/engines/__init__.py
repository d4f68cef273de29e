"""Servers that answer questions: `client.py` sends a request, `asking.py` asks what is missing and stores it."""
