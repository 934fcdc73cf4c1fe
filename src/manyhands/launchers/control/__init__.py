"""The control plane: authenticated connections that carry calls, results and status, never tensors.

What lives here: the server (one per call of a worker group or per executor), the client in every worker, the
connection and handshake between them, remote calls, and the memory page where workers write their status. The
lowest floor of the launchers: nothing here may import another part of them.
"""
