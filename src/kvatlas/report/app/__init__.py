"""The web app of a run, as one HTML file, as files, or served on this machine."""
