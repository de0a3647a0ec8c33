"""`jaxserve bench`: measuring servers over HTTP, and the engine in this process.

Knows of servers what OpenAI's API says, and of jaxserve its public names; never the insides of either.
"""
