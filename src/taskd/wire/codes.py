"""The codes as the wire knows them. They are words of the model, because decisions give them."""

from taskd.model.codes import NetCode, RecoverCode, TraceCode

__all__ = ["NetCode", "RecoverCode", "TraceCode"]
