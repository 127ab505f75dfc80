// Fields of forms: a label, a hint, and what is wrong with what was typed, said beside it and while typing.

import { el } from "./dom.js";

let made = 0;

// `check(value)` answers with what is wrong, or null. `node` is the whole field, `input` what is typed into.
export function field(label, input, { hint = null, check = () => null, required = false, name = null } = {}) {
  made += 1;
  const id = `f${made}`;
  const error = el("p", { class: "error", id: `${id}-error`, "aria-live": "polite" });
  const described = [hint && `${id}-hint`, `${id}-error`].filter(Boolean).join(" ");
  input.id = id;
  input.setAttribute("aria-describedby", described);
  if (required) input.required = true;
  const node = el(
    "div",
    { class: "field" },
    el("label", { for: id }, label, required && el("span", { class: "muted" }, " (required)")),
    hint && el("p", { class: "hint", id: `${id}-hint` }, hint),
    input,
    error,
  );
  const tell = (text) => {
    error.textContent = text ?? "";
    if (text) input.setAttribute("aria-invalid", "true");
    else input.removeAttribute("aria-invalid");
    return !text;
  };
  const one = {
    node,
    input,
    name,
    tell,
    get value() {
      return input.value;
    },
    // Checks what is typed. What is required and empty is only said when the form is sent.
    check(sending = false) {
      if (!input.value.trim())
        return tell(required && sending ? `${label} is required.` : null) && !(required && sending);
      return tell(check(input.value));
    },
  };
  input.addEventListener("input", () => one.check());
  return one;
}

export const text = (attributes = {}) =>
  el("input", { type: "text", autocomplete: "off", spellcheck: "false", ...attributes });
export const area = (attributes = {}, text = "") =>
  el("textarea", { rows: "6", spellcheck: "false", class: "code", ...attributes }, text);
export const choice = (options, value) => {
  const select = el("select", {}, ...options.map(([key, shown]) => el("option", { value: key }, shown ?? key)));
  select.value = value;
  return select;
};

// Checks all; the first that is wrong takes the focus.
export function allRight(fields) {
  const wrong = fields.filter((one) => !one.check(true));
  openTo(wrong[0]);
  return !wrong.length;
}

function openTo(one) {
  if (!one) return;
  const closed = one.input.closest("details");
  if (closed) closed.open = true;
  one.input.focus();
}

// Shows what the service refused at the field that it names; false if no field here has that name.
export function blame(fields, error) {
  const named =
    error.field &&
    fields.find(
      (one) =>
        one.name === error.field || error.field.startsWith(`${one.name}.`) || error.field.startsWith(`${one.name}[`),
    );
  if (!named) return false;
  const sentence = error.message;
  named.tell(`${sentence[0].toUpperCase()}${sentence.slice(1)}.`.replace(/\.\.$/, "."));
  openTo(named);
  return true;
}
