// Builds the page out of nodes. Text is only ever set as text, so nothing that a timer carries can become markup.

export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(name, value);
    else if (name === "value") node.value = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(2).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export const button = (text, click, attributes = {}) => el("button", { type: "button", click, ...attributes }, text);

// A heading that takes the focus when its page is shown.
export const title = (...inside) => el("h1", { tabindex: "-1" }, ...inside);

export const section = (heading, ...inside) => {
  const id = `s-${heading.toLowerCase().replaceAll(/[^a-z]+/g, "-")}`;
  return el("section", { class: "card", "aria-labelledby": id }, el("h2", { id }, heading), ...inside);
};

export const number = (value) => value.toLocaleString("en-US");

// How many, where counting may have stopped at a bound.
export const counted = ({ timers, more }) => `${number(timers)}${more ? "+" : ""}`;

export const plural = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;

const GLYPHS = { pending: "○", executing: "◐", completed: "✓", failed: "✕", canceled: "–" };

export const badge = (status) =>
  el("span", { class: `badge ${status}` }, el("span", { "aria-hidden": "true" }, GLYPHS[status] ?? "·"), ` ${status}`);

// Says something once, to eyes and to screen readers.
export function say(text, kind = "note") {
  const line = el(
    "p",
    { class: `toast ${kind}` },
    text,
    button("✕", () => line.remove(), { "aria-label": "Dismiss", class: "bare" }),
  );
  const place = document.getElementById("said");
  place.replaceChildren(...[...place.children].slice(-2), line);
  setTimeout(() => line.remove(), kind === "bad" ? 15_000 : 6_000);
}

// Says something to screen readers alone, at most every ten seconds: a page that changes all the time must not chatter.
let quietUntil = 0;
export function murmur(text) {
  if (performance.now() < quietUntil) return;
  quietUntil = performance.now() + 10_000;
  const line = el("p", { class: "unseen" }, text);
  document.getElementById("said").append(line);
  setTimeout(() => line.remove(), 5_000);
}

export function problem(error, again) {
  return el(
    "div",
    { class: "card problem", role: "alert" },
    title("That did not work"),
    el("p", {}, error.message),
    again && button("Try again", again),
  );
}

export async function copy(text, what) {
  try {
    await navigator.clipboard.writeText(text);
    say(`Copied ${what}.`);
  } catch {
    // Without a secure context there is no clipboard: show it to be copied by hand.
    const area = el("textarea", { readonly: true, rows: "8", "aria-label": what, value: text });
    const shown = dialog(`Copy ${what}`, [
      el("p", {}, "The browser does not let this page use the clipboard. Copy it from here:"),
      area,
    ]);
    area.select();
    await shown;
  }
}

// A dialog that answers with the value of the button that closed it, or null (Escape, Cancel).
// `act` may keep it open: it is given the value and returns false for that. The promise can `close` it too.
export function dialog(heading, inside, choices = [], { act = () => true, cancel = "Close", wide = false } = {}) {
  let box;
  const answered = new Promise((resolve) => {
    let answer = null;
    const choose = async (value, pressed) => {
      pressed.disabled = true;
      try {
        if ((await act(value)) === false) return;
        answer = value;
        box.close();
      } finally {
        pressed.disabled = false;
      }
    };
    const buttons = choices.map(([value, text, kind]) =>
      el("button", { type: choices[0][0] === value ? "submit" : "button", class: kind ?? "main", value }, text),
    );
    const form = el(
      "form",
      {
        novalidate: true,
        submit: (event) => {
          event.preventDefault();
          if (buttons[0]) choose(buttons[0].value, buttons[0]);
        },
      },
      el("h2", { id: "dialog-title" }, heading),
      ...inside,
      el(
        "div",
        { class: "actions" },
        ...buttons,
        button(cancel, () => box.close()),
      ),
    );
    box = el(
      "dialog",
      {
        "aria-labelledby": "dialog-title",
        class: wide ? "wide" : null,
        close: () => {
          box.remove();
          resolve(answer);
        },
      },
      form,
    );
    document.body.append(box);
    box.showModal();
  });
  return Object.assign(answered, { close: () => box.close() });
}
