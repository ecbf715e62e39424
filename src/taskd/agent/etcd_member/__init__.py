"""The etcd that `taskd run` starts by itself for a job of several nodes."""
