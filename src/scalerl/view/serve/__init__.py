"""A local page of the runs in a folder: listed, followed live, laid over one another, and compared.

    listing   which runs there are in the folder, and below it
    sweep     which of them have changed
    fits      their fits, and the answers made of them
    logs      the runs of a log: their ids, and the devices that the user gives
    store     what was read and fitted of them, and what has changed since when
    app       the page and its JSON, read-only; which requests are answered, and the headers of every answer
    server    the socket, the browser, and an immediate shutdown

Nothing is ever written in the folder. It needs the extra `serve` (starlette, uvicorn).

Imported by `cli`.
"""
