// Signing in: the API key is sent once, and the browser gets a cookie for half a day that no script can read.

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
        failure.status === 401 || failure.status === 400 ? "That is not the API key of this service." : failure.message;
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
          "Started with ",
          el("code", {}, "make run"),
          "? The key was made for you and is in the file ",
          el("code", {}, "duetime.key"),
          ", in the folder where the service runs. In a terminal there:",
        ),
        el("pre", {}, el("code", {}, "cat duetime.key")),
        el("p", {}, "On a server it is the ", el("code", {}, "API_KEY"), " that was set there: ask whoever runs it."),
      ),
    ),
  );
  key.focus();
}
