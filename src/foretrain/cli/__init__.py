"""The command line. Command bodies import what they need, so that help is quick."""
