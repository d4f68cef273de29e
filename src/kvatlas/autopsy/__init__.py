"""The autopsy of lost answers: which evicted tokens, put back, restore them, and the kinds of death."""
