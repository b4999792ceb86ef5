"""A local page of the runs in a folder: listed, followed live, drawn in one chart, and compared.

    listing   finds the runs in the folder and below it
    sweep     finds those that have changed
    fits      their fits, and cached answers
    logs      the runs of a log: their ids, and the devices that the user gives
    store     the records and fits of the runs, and the version of every change
    app       the page and its JSON, read-only; the allowed requests, and the headers of every response
    server    the socket, the browser, and an immediate shutdown

Nothing is ever written in the folder. It needs the extra `serve` (starlette, uvicorn).

Imported by `cli`.
"""
