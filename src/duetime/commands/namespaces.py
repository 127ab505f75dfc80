"""``duetime namespaces`` and its subcommands."""

from __future__ import annotations

import argparse

from duetime.client import Client, Namespace
from duetime.commands import output, tables
from duetime.commands.session import UsageError


def list_namespaces(client: Client, options: argparse.Namespace) -> int:
    found = client.namespaces()
    if options.json:
        output.print_json({"namespaces": found})
    else:
        print(*tables.namespaces_table(found), sep="\n")
    return 0


def _say(namespace: Namespace, options: argparse.Namespace) -> int:
    if options.json:
        output.print_json(namespace)
    else:
        print(*tables.namespace_fields(namespace), sep="\n")
    return 0


def create(client: Client, options: argparse.Namespace) -> int:
    made = client.create_namespace(
        options.name, shards=options.shards, retention=options.retention, weight=options.weight
    )
    return _say(made, options)


def update(client: Client, options: argparse.Namespace) -> int:
    if options.retention is None and options.weight is None:
        raise UsageError("nothing to change: give --retention or --weight")
    return _say(client.update_namespace(options.name, retention=options.retention, weight=options.weight), options)


def show(client: Client, options: argparse.Namespace) -> int:
    return _say(client.namespace(options.name), options)


def pause(client: Client, options: argparse.Namespace) -> int:
    return _say(client.pause(options.name), options)


def resume(client: Client, options: argparse.Namespace) -> int:
    return _say(client.resume(options.name), options)


def add_secret(client: Client, options: argparse.Namespace) -> int:
    made = client.add_secret(options.name)
    if options.json:
        output.print_json(made)
    else:
        shown = [("id", made.id), ("secret", f"{made.secret}  (shown only now)")]
        print(*output.fields(shown), sep="\n")
    return 0


def delete_secret(client: Client, options: argparse.Namespace) -> int:
    client.delete_secret(options.name, options.id)
    if options.json:
        output.print_json({"deleted": options.id})
    else:
        print(f"{output.safe(options.id)}  deleted; it no longer signs callbacks")
    return 0
