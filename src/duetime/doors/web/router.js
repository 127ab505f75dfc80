// Which page the address asks for: #/timers/default/order-17?x=y is { path: ["timers", "default", "order-17"], query }.

const decoded = (text) => {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
};

export function route() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  return {
    path: path ? path.split("/").map(decoded) : [],
    query: Object.fromEntries(new URLSearchParams(query ?? "")),
  };
}

// Changes the query of this page's address without leaving the page.
export function keep(query) {
  const path = location.hash.replace(/\?.*$/s, "") || "#/";
  history.replaceState(null, "", query ? `${path}?${query}` : path);
}
