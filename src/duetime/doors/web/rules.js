// The service's own rules, from its OpenAPI document, said to people while they type.

import * as api from "./api.js";

// What a schema says about a value that is there: references followed, "or null" left out.
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

// Why a text does not keep the rules; null when it does.
export function fault(text, rule) {
  const {
    minLength = 0,
    maxLength = Infinity,
    pattern,
    minimum = -Infinity,
    maximum = Infinity,
    type,
    description,
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
  if (length > maxLength) return `Must have at most ${maxLength} characters; this has ${length}.`;
  if (length < minLength || (pattern && !new RegExp(pattern, "u").test(text)))
    return `Must be ${description ?? "something else"}.`;
  return null;
}

// Why a text is not JSON, with its place; null when it is, or when there is none.
export function jsonFault(text) {
  if (!text.trim()) return null;
  try {
    JSON.parse(text);
    return null;
  } catch (error) {
    return `Not JSON yet: ${error.message.replace(/^JSON\.parse: /, "")}.`;
  }
}
