"""`kvatlas serve`: an OpenAI-compatible server over the one engine."""
