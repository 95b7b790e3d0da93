"""Answers requests over HTTP, in the form of OpenAI's API.

This room holds what is between a socket and `inference.engine`: `asked` reads a request's fields, `words` turns texts into token ids,
`worker` runs the engine in a thread of its own, `told` writes answers, `app` has the routes, `server` the process, and
`followers` what process 0 tells the others that serve with it.
It holds no models, no generation and no flags. It imports starlette and uvicorn, the extra `serve`, in `app` and `server` alone.
To read another field, add a row to the tables of `asked`.
"""
