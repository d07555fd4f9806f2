"""Transfers of KV blocks between the pools of two workers, over any of several transports."""
