"""Clients that generators make from the OpenAPI document: each is built, and makes a round trip to a real service."""
