"""The HTTP server and the command line: OpenAI's API in front of one engine.

Imports only public names of jaxserve; knows no model, no device and no scheduler.
"""
