"""Other programs: models behind APIs come in through Inspect."""
