"""What cells are: traces counted, means with intervals, maps and curves of them."""
