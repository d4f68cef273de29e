"""Heatmaps as pictures: for papers (PNG, SVG, PDF)."""
