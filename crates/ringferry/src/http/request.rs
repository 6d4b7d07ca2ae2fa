//! The head of a request (RFC 9112), as far as a server of a few pages needs it.

use std::net::{IpAddr, Ipv6Addr};

/// Longest request, in bytes, with its headers.
pub const MAX_REQUEST: usize = 8 * 1024;

/// A request for something: GET, or HEAD, which wants to know about it only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    pub is_head: bool,
    /// What is before a question mark, as it was sent.
    pub path: String,
    query: String,
    fields: Vec<(String, String)>,
}

impl Request {
    /// Returns true if it names this host in a way that no name server can, so that no page of another site has led a browser here by a name of its own.
    /// A proxy that connects to a Unix socket passes on whatever name it has itself.
    pub fn names_this_host(&self, is_unix: bool) -> bool {
        let hosts: Vec<_> = self.field("host").collect();
        is_unix || matches!(hosts[..], [host] if is_this_host(host))
    }

    /// Returns true unless a browser says that another site's page has made the request.
    pub fn is_of_same_site(&self) -> bool {
        self.field("sec-fetch-site").all(|site| matches!(site, "same-origin" | "none"))
    }

    /// The values of all fields of this name, in their order.
    pub fn field<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        let of_name = self.fields.iter().filter(move |(field, _)| field.eq_ignore_ascii_case(name));
        of_name.map(|(_, value)| value.as_str())
    }

    /// The value of a parameter behind the question mark, decoded; `None` if there is none, or its value is no UTF-8.
    pub fn parameter(&self, name: &str) -> Option<String> {
        let pairs = self.query.split('&').map(|pair| pair.split_once('=').unwrap_or((pair, "")));
        pairs.into_iter().find(|(found, _)| *found == name).and_then(|(_, value)| decode(value))
    }
}

/// Decodes `%41` to `A` (RFC 3986, 2.1).
fn decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, after @ ..] = rest {
        rest = after;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let digit = |byte: &u8| char::from(*byte).to_digit(16);
        let [high, low, after @ ..] = rest else { return None };
        bytes.push((16 * digit(high)? + digit(low)?) as u8);
        rest = after;
    }
    String::from_utf8(bytes).ok()
}

/// The part of a request that has come.
#[derive(Debug, PartialEq, Eq)]
pub enum Parsed {
    /// Its head has not come to its end.
    Partly,
    Whole(Request),
    /// It is neither GET nor HEAD.
    OtherMethod,
    /// The status that says why not.
    Refused(&'static str),
}

/// Reads the head of a request.
pub fn parse(request: &[u8]) -> Parsed {
    let end = request
        .windows(4)
        .position(|bytes| bytes == b"\r\n\r\n")
        .or_else(|| request.windows(2).position(|bytes| bytes == b"\n\n"));
    let Some(end) = end else {
        return if request.len() < MAX_REQUEST {
            Parsed::Partly
        } else {
            Parsed::Refused("431 Request Header Fields Too Large")
        };
    };
    let Ok(head) = str::from_utf8(&request[..end]) else { return Parsed::Refused("400 Bad Request") };
    let mut lines = head.lines();
    let words: Vec<_> = lines.next().unwrap_or_default().split(' ').collect();
    let [method, target, version] = words[..] else { return Parsed::Refused("400 Bad Request") };
    if !version.starts_with("HTTP/1.") {
        return Parsed::Refused("505 HTTP Version Not Supported");
    }
    if !matches!(method, "GET" | "HEAD") {
        return Parsed::OtherMethod;
    }
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let fields = lines.filter_map(|line| line.split_once(':'));
    Parsed::Whole(Request {
        is_head: method == "HEAD",
        path: path.to_owned(),
        query: query.to_owned(),
        fields: fields.map(|(name, value)| (name.to_owned(), value.trim().to_owned())).collect(),
    })
}

/// Returns true if a `Host` is this one whatever name servers say: given by an address, or as `localhost`. The port does not matter.
fn is_this_host(host: &str) -> bool {
    let (name, port) = match host.rsplit_once(':') {
        Some((name, port)) if !host.ends_with(']') => (name, port),
        _ => (host, ""),
    };
    let is_address = match name.strip_prefix('[').and_then(|name| name.strip_suffix(']')) {
        Some(name) => name.parse::<Ipv6Addr>().is_ok(),
        None => name.parse::<IpAddr>().is_ok_and(|address| address.is_ipv4()),
    };
    (is_address || name.eq_ignore_ascii_case("localhost")) && port.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A request that must be whole.
    #[track_caller]
    pub fn request(text: &str) -> Request {
        match parse(text.as_bytes()) {
            Parsed::Whole(request) => request,
            other => panic!("{text:?}: {other:?}"),
        }
    }

    #[test]
    fn a_request_is_its_method_its_path_its_query_and_its_fields() {
        let found = request(
            "HEAD /why?port=vm%200&x=%C3%bc&bad=%zz&worse=%ff HTTP/1.1\r\naCCept: a\r\nHost:b\r\nACCEPT: c \r\n\r\n",
        );
        assert_eq!((found.is_head, found.path.as_str()), (true, "/why"));
        assert_eq!(found.field("Accept").collect::<Vec<_>>(), ["a", "c"]);
        assert_eq!(found.field("host").collect::<Vec<_>>(), ["b"]);
        let of = |name| found.parameter(name);
        assert_eq!((of("port"), of("x")), (Some("vm 0".to_owned()), Some("ü".to_owned())));
        assert_eq!([of("bad"), of("worse"), of("none")], [None, None, None]);
        assert_eq!(request("GET / HTTP/1.0\n\n").path, "/");
    }

    #[test]
    fn what_is_no_request_is_refused_with_its_status() {
        for (text, parsed) in [
            ("GET / HTTP/1.1\r\nHost: a\r\n", Parsed::Partly),
            ("", Parsed::Partly),
            ("POST /metrics HTTP/1.1\r\n\r\n", Parsed::OtherMethod),
            ("GET /metrics HTTP/2\r\n\r\n", Parsed::Refused("505 HTTP Version Not Supported")),
            ("GET  / HTTP/1.1\r\n\r\n", Parsed::Refused("400 Bad Request")),
            ("\r\n\r\n", Parsed::Refused("400 Bad Request")),
        ] {
            assert_eq!(parse(text.as_bytes()), parsed, "{text}");
        }
        assert_eq!(parse(b"GET / HTTP/1.1\r\nx: \xff\r\n\r\n"), Parsed::Refused("400 Bad Request"));
        assert_eq!(parse(&[b'x'; MAX_REQUEST]), Parsed::Refused("431 Request Header Fields Too Large"));
    }

    #[test]
    fn only_names_that_no_name_server_gives_are_this_host() {
        for host in ["127.0.0.1", "127.0.0.1:9483", "[::1]:9483", "[::1]", "LocalHost:1", "10.0.0.7:80"] {
            assert!(is_this_host(host), "{host}");
        }
        for host in [
            "",
            "evil.example",
            "evil.example:9483",
            "localhost.evil.example",
            "127.0.0.1.evil.example:9483",
            "::1",
            "[::1",
            "127.0.0.1:x",
            "127.0.0.1:80:80",
            "[127.0.0.1]",
            "user@127.0.0.1",
        ] {
            assert!(!is_this_host(host), "{host}");
        }
    }
}
