// Builds the page from DOM nodes. Text is only ever set as text, so timer data can't become markup.

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

// Makes a node equal to another one, in place: a node that is replaced loses the focus, and the click if the mouse button
// is down. Only for nodes without listeners.
export function become(node, fresh) {
  if (node.isEqualNode(fresh)) return;
  if (node.nodeName !== fresh.nodeName) node.replaceWith(fresh);
  else if (node.nodeType === Node.TEXT_NODE) node.data = fresh.data;
  else {
    for (const { name } of [...node.attributes]) if (!fresh.hasAttribute(name)) node.removeAttribute(name);
    for (const { name, value } of fresh.attributes) node.setAttribute(name, value);
    const [before, after] = [[...node.childNodes], [...fresh.childNodes]];
    for (const one of before.slice(after.length)) one.remove();
    after.forEach((one, at) => (at < before.length ? become(before[at], one) : node.append(one)));
  }
}

// Shows these nodes in a place. Those that are there already keep the focus, the selection and the click that has begun.
export function put(place, nodes) {
  if (nodes.length !== place.children.length || nodes.some((node, at) => node !== place.children[at]))
    place.replaceChildren(...nodes);
}

// A heading that gets the focus when its page is shown.
export const title = (...inside) => el("h1", { tabindex: "-1" }, ...inside);

export const section = (heading, ...inside) => {
  const id = `s-${heading.toLowerCase().replaceAll(/[^a-z]+/g, "-")}`;
  return el("section", { class: "card", "aria-labelledby": id }, el("h2", { id }, heading), ...inside);
};

export const number = (value) => value.toLocaleString("en-US");

// A count as text: + if counting stopped at a bound, ~ if it is an estimate.
export const counted = ({ timers, more, estimated }) => `${estimated ? "~" : ""}${number(timers)}${more ? "+" : ""}`;

// The tooltip of a count, which explains the ~.
export const meaning = ({ estimated }) => (estimated ? "An estimate: this database keeps no exact count." : null);

export const plural = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;

const GLYPHS = { pending: "○", executing: "◐", completed: "✓", failed: "✕", canceled: "–" };

export const badge = (status) =>
  el("span", { class: `badge ${status}` }, el("span", { "aria-hidden": "true" }, GLYPHS[status] ?? "·"), ` ${status}`);

// Shows a message for a few seconds; screen readers announce it.
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

// Announces something to screen readers only, at most every ten seconds, so that a busy page does not chatter.
let quietUntil = 0;
export function murmur(text) {
  if (performance.now() < quietUntil) return;
  quietUntil = performance.now() + 10_000;
  const line = el("p", { class: "unseen" }, text);
  document.getElementById("said").append(line);
  setTimeout(() => line.remove(), 5_000);
}

export function problem(error, again, heading = "Something went wrong") {
  return el(
    "div",
    { class: "card problem", role: "alert" },
    title(heading),
    el("p", {}, error.message),
    again && button("Try again", again),
  );
}

export async function copy(text, what) {
  try {
    await navigator.clipboard.writeText(text);
    say(`Copied ${what}.`);
  } catch {
    // Without a secure context there is no clipboard: show the text to copy by hand.
    const area = el("textarea", { readonly: true, rows: "8", "aria-label": what, value: text });
    const shown = dialog(`Copy ${what}`, [
      el("p", {}, "The browser does not allow this page to use the clipboard. Copy the text from here:"),
      area,
    ]);
    area.select();
    await shown;
  }
}

// Opens a dialog. Resolves to the value of the button that closed it, or to null (Escape, Cancel).
// `act` gets the value and can return false to keep the dialog open. The promise has a `close` method.
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
