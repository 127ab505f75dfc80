// Validates input while typing, by the rules of the service's OpenAPI document.

import * as api from "./api.js";

// The schema of a value that is present: follows references and drops "or null".
function plain(schema, all) {
  const named = schema.$ref ? all[schema.$ref.split("/").at(-1)] : schema;
  const given = named.anyOf?.filter((one) => one.type !== "null");
  return given?.length === 1 ? { ...named, ...plain(given[0], all) } : named;
}

// The rules of one request: rules.of("callbackUrl"), rules.of("retryPolicy", "maxRetries").
export async function rulesOf(name) {
  const all = await api.schemas();
  return {
    of: (...path) =>
      path.reduce((schema, field) => plain(schema.properties?.[field] ?? {}, all), plain(all[name], all)),
  };
}

export const DURATION = "Must be a duration such as 500ms, 30s or 1h30m.";

// The first rule that a text breaks, as a sentence; null if it breaks none. `expected` says what the pattern allows.
export function fault(text, rule, expected = "Not valid.") {
  const {
    minLength = 0,
    maxLength = Infinity,
    pattern,
    minimum = -Infinity,
    maximum = Infinity,
    type,
  } = rule;
  if (type === "integer" || type === "number") {
    const value = Number(text);
    if (Number.isNaN(value) || (type === "integer" && !Number.isInteger(value)))
      return `Must be a ${type === "integer" ? "whole " : ""}number.`;
    if (value < minimum) return `Must be at least ${minimum}.`;
    if (value > maximum) return `Must be at most ${maximum}.`;
    return null;
  }
  const length = [...text].length;
  if (length > maxLength) return `Must have at most ${maxLength} characters; it has ${length}.`;
  if (length < minLength || (pattern && !new RegExp(pattern, "u").test(text)))
    return expected;
  return null;
}

// The syntax error of a JSON text, with its position; null if the text is valid or empty.
export function jsonFault(text) {
  if (!text.trim()) return null;
  try {
    JSON.parse(text);
    return null;
  } catch (error) {
    return `Not valid JSON: ${error.message.replace(/^JSON\.parse: /, "")}.`;
  }
}
