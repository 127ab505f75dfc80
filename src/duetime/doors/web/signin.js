// Sign-in: sends the API key once and gets a cookie for twelve hours that no script can read.

import * as api from "./api.js";
import { el, title } from "./dom.js";

export function show(main) {
  const key = el("input", {
    id: "key",
    type: "password",
    autocomplete: "current-password",
    required: true,
    "aria-describedby": "key-where key-error",
    spellcheck: "false",
  });
  const error = el("p", { id: "key-error", class: "error", role: "alert" });
  const submit = el("button", { class: "main" }, "Sign in");
  const enter = async (event) => {
    event.preventDefault();
    submit.disabled = true;
    error.textContent = "";
    key.removeAttribute("aria-invalid");
    try {
      await api.session.begin(key.value.trim());
      document.dispatchEvent(new Event("signedin"));
    } catch (failure) {
      error.textContent =
        failure.status === 401 || failure.status === 400 ? "Wrong API key." : failure.message;
      key.setAttribute("aria-invalid", "true");
      key.select();
    } finally {
      submit.disabled = false;
    }
  };
  main.replaceChildren(
    el(
      "form",
      { class: "card signin", submit: enter },
      title("Sign in"),
      el("input", { type: "text", autocomplete: "username", value: "duetime", hidden: true }),
      el("label", { for: "key" }, "API key"),
      key,
      error,
      submit,
      el(
        "div",
        { id: "key-where", class: "muted" },
        el(
          "p",
          {},
          "If ",
          el("code", {}, "API_KEY"),
          " is not set, the server has generated a key and written it to a file beside its database:",
        ),
        el("pre", {}, el("code", {}, "cat duetime.key")),
        el("p", {}, "Otherwise the key is the ", el("code", {}, "API_KEY"), " setting: ask your operator."),
      ),
    ),
  );
  key.focus();
}
