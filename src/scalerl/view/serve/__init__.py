"""A local page of the runs in a folder: listed, followed live, laid over one another, and compared.

    listing   which runs there are in the folder, and below it
    store     what was read and fitted of them, and what has changed since when
    app       the page and its JSON, read-only
    guard     who may ask: host names, the token, the headers of every answer
    server    the socket, and an end at once

Nothing is ever written in the folder. It needs the extra `serve` (starlette, uvicorn).
"""
