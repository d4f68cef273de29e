"""Servers of other engines: a setting is a command. To be read in this order: command, server, client, asking."""
