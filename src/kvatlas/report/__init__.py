"""The result of runs and maps as text, JSON, pictures and the app."""
