"""Two at a time: settings, policies, models and maps on the same problems."""
