// Form fields: a label, a hint and the validation error, which updates while typing.

import { el } from "./dom.js";

let made = 0;

// `check(value)` returns the error or null. `node` is the whole field, `input` its input element.
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
    // Validates the input. An empty required field is an error only when the form is sent.
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
  if (select.selectedIndex < 0) select.selectedIndex = 0; // The value is not one of the options.
  return select;
};

// Validates all fields and focuses the first invalid one.
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

// Shows the service's error at the field that it names; false if this form has no such field.
export function blame(fields, error) {
  const named =
    error.field &&
    fields.find(
      (one) =>
        one.name === error.field || error.field.startsWith(`${one.name}.`) || error.field.startsWith(`${one.name}[`),
    );
  if (!named) return false;
  named.tell(error.message);
  openTo(named);
  return true;
}
