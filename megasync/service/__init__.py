"""A training service that speaks Tinker's protocol: sessions, models of several tenants, and promises that are kept.

`service` is the object behind the endpoint, and what a program uses without HTTP (`megasync.Service`). It is a
satellite: it reaches ranks and servers through `interfaces`, and the core does not import it.
"""
