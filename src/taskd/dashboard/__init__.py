"""`taskd dashboard`: a separate process that shows jobs in a browser (extra `taskd[dashboard]`).

    clusterd --Watch, Replay--> job_feed.py --views--> web_server.py --server-sent events--> browser

`incidents.py`, `carpet.py`, `views.py` and `actions.py` are pure: they turn messages of clusterd
into what is shown, and are the same for the live page and for `taskd replay --html`. The dashboard
has no permissions of its own: every request is made with the token of the person who is signed in.
"""
