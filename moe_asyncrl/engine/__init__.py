"""SGLang: the server process, the client, the pool of engines, and the plugin that runs inside a server."""
