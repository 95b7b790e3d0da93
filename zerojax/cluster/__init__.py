"""Starts one command on every host of a run and keeps it alive: hosts and slots, an agent on each host, heartbeats, restarts.

The launcher trains nothing and starts no JAX backend. It says who is guilty by what the agents report; `watch` is the side of the process.
To add a transport beside ssh, extend `connection.command`.
"""
