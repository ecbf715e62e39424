"""`taskd dashboard`: a process of its own that shows jobs in a browser (extra `taskd[dashboard]`).

    clusterd  --Watch, Replay-->  feed.py  --views-->  server.py  --server-sent events-->  browser

`incidents.py`, `carpet.py`, `views.py` and `actions.py` are pure: they turn messages of clusterd
into what is shown, and are the same for the live page and for `taskd replay --html`. The dashboard
holds no right of its own: every request is made with the token of the person who is signed in.
"""
