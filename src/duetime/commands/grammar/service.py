"""The commands for the service itself: how it is doing, namespaces, diagnosis, profiles and shell completion."""

from __future__ import annotations

import argparse

from duetime.commands.grammar.parser import Commands, Parser, add_command, add_server_options, count

SHELLS = ("bash", "zsh", "fish")


def add_service_commands(commands: Commands) -> None:
    add_command(
        commands,
        "stats",
        "stats:stats",
        "show counts, what is due and overdue, and how late timers fire",
        "Show how many timers there are, what is due soon, what is overdue and why, how fast and how late timers fire.",
        "  duetime stats\n  duetime stats --json",
    )
    add_command(
        commands,
        "destinations",
        "stats:destinations",
        "list the destinations at which timers failed",
        "List the destinations of the latest failed timers (up to 500), those with most failures first.",
        "  duetime destinations",
    )
    _add_namespaces(commands)
    add_command(
        commands,
        "cluster",
        "cluster:show",
        "list the instances and the shards they own",
        "List the instances that share the store: the shards each owns, its version, and its clock's offset.",
        "  duetime cluster",
    )
    add_command(
        commands,
        "doctor",
        "doctor:run",
        "check the settings, the store, the clock, the broker and the service",
        """\
Check what the service needs to start here (the settings, the key, the store, the clock, the broker), whether it runs
and why timers are overdue. With --server, TIMER_URL or a profile, check the service there instead: whether it can be
reached, accepts the key and is ready, its version and its clock. It changes nothing. The exit code is 1 if a check
fails.""",
        "  duetime doctor\n  duetime doctor --server http://localhost:3000",
        offline=True,
    )
    add_command(
        commands,
        "profiles",
        "profiles:show",
        "list the profiles of the configuration file",
        """\
List the profiles in ~/.config/duetime/config.toml (or $XDG_CONFIG_HOME/duetime/config.toml), without their keys.
A profile is a table with server, key or key_file, and namespace:

  [prod]
  server = "https://timers.example.com"
  key_file = "prod.key"
  namespace = "shop\"""",
        "  duetime profiles\n  duetime --profile prod list      (with the profile above)",
        offline=True,
    )
    completion = commands.add_parser(
        "completion",
        help="print a completion script for bash, zsh or fish",
        description="Print a completion script: commands, options and their choices.",
        epilog="""\
examples:
  source <(duetime completion bash)          in bash and zsh: for this shell; put it in ~/.bashrc or ~/.zshrc to keep it
  duetime completion fish > ~/.config/fish/completions/duetime.fish""",
    )
    completion.add_argument("shell", choices=SHELLS)


def _add_namespaces(commands: Commands) -> None:
    examples = """\
examples:
  duetime namespaces create shop --retention 90d
  duetime namespaces pause shop"""
    top: Parser = commands.add_parser(
        "namespaces",
        help="list, create, change, pause and resume namespaces; manage signing secrets",
        description="List the namespaces, or run one of these:",
        epilog=examples,
    )
    top.set_defaults(handler="namespaces:list_namespaces", offline=False)
    add_server_options(top, default=argparse.SUPPRESS)
    inner = top.add_subparsers(metavar="command", title="commands")

    def add(within: Commands, name: str, handler: str, help: str) -> Parser:
        return add_command(within, name, f"namespaces:{handler}", help)

    add(inner, "list", "list_namespaces", "list the namespaces")
    create = add(inner, "create", "create", "create a namespace")
    create.add_argument("name")
    create.add_argument("--shards", type=count, metavar="N", help="how many shards it uses; can't be changed [all]")
    update = add(
        inner, "update", "update", "change the retention or weight of a namespace; omitted options keep their values"
    )
    update.add_argument("name")
    for parser in (create, update):
        parser.add_argument("--retention", metavar="DURATION", help="how long finished timers are kept: 30d, forever")
    share = "its share when more is due than can be delivered: 1 to 100"
    create.add_argument("--weight", type=count, metavar="N", help=f"{share} [1]")
    update.add_argument("--weight", type=count, metavar="N", help=share)
    add(inner, "show", "show", "show a namespace").add_argument("name")
    add(inner, "pause", "pause", "pause a namespace: its timers do not fire, new ones are still accepted").add_argument(
        "name"
    )
    add(inner, "resume", "resume", "resume a paused namespace").add_argument("name")
    secret = inner.add_parser("secret", help="create and delete signing secrets", description="Signing secrets.")
    secrets = secret.add_subparsers(metavar="command", title="commands", required=True)
    text = "create a signing secret, shown only now; the previous one also signs for another 24 hours"
    add(secrets, "add", "add_secret", text).add_argument("name", help="the namespace")
    delete = add(secrets, "delete", "delete_secret", "delete a signing secret")
    delete.add_argument("name", help="the namespace")
    delete.add_argument("id", help="the secret's id, as `duetime namespaces show` lists it")
