// Creates a timer, then opens its page, which shows it fire.

import * as api from "./api.js";
import { definitionForm, namespaceNames } from "./definition.js";
import { button, el, say, title } from "./dom.js";

export async function show(main, { query }, signal) {
  const form = await definitionForm(null, await namespaceNames(signal), query);
  const submit = el("button", { class: "main" }, "Create timer");
  const send = async (event) => {
    event.preventDefault();
    const body = form.body();
    if (body === null) return;
    submit.disabled = true;
    try {
      const made = await api.post("/timers", body);
      const changed = made.status !== "pending" || made.updatedAt !== made.createdAt;
      say(changed ? `This timer already exists and is ${made.status}: nothing was changed.` : "Timer created.");
      location.hash = api.timerLink(made);
    } catch (error) {
      if (!form.blame(error)) say(error.message, "bad");
    } finally {
      submit.disabled = false;
    }
  };
  main.replaceChildren(
    title("New timer"),
    el(
      "form",
      { class: "card narrow", novalidate: true, submit: send },
      form.node,
      el(
        "div",
        { class: "actions" },
        submit,
        button("Back", () => history.back()),
      ),
    ),
  );
  form.focus();
}
