"""SGLang servers as a fleet: messages, client, server process, weights. Imports nothing else of the project."""
