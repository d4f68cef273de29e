"""Keys and values in fewer bits."""
