//! Hosts and origins that requests may name.

use std::net::{Ipv4Addr, Ipv6Addr};

use axum::http::uri::Authority;

/// Host names that requests may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hosts {
    Any,
    /// Names of this machine, IP addresses, and these.
    Local(Vec<String>),
}

impl Hosts {
    /// Whether a request may name this host, with or without a port.
    ///
    /// A page of `http://evil.example` can have its name point to 127.0.0.1 (DNS rebinding): its requests are then of
    /// its own origin, and only the host name reveals them. No page can have an address or `localhost` for its name.
    pub fn allow(&self, host: &str) -> bool {
        let Self::Local(names) = self else { return true };
        let Ok(authority) = host.parse::<Authority>() else { return false };
        let name = authority.host();
        if let Some(address) = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')) {
            return address.parse::<Ipv6Addr>().is_ok();
        }
        let name = name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase();
        name.parse::<Ipv4Addr>().is_ok()
            || name == "localhost"
            || name.ends_with(".localhost")
            || names.iter().any(|allowed| allowed.eq_ignore_ascii_case(&name))
    }
}

/// Origins whose pages may read answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cors {
    /// None: browsers refuse pages of other origins.
    Off,
    /// Pages of this machine.
    Localhost,
    /// Any page: its origin is echoed.
    Any,
    /// Pages of these origins.
    Origins(Vec<String>),
}

impl Cors {
    /// Whether an origin is allowed.
    pub fn allows(&self, origin: &str) -> bool {
        match self {
            Self::Off => false,
            Self::Any => true,
            Self::Origins(origins) => origins.iter().any(|allowed| allowed == origin),
            Self::Localhost => {
                let host = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
                let is_port = |rest: &str| {
                    rest.is_empty()
                        || rest
                            .strip_prefix(':')
                            .is_some_and(|port| !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit()))
                };
                host.is_some_and(|host| {
                    ["localhost", "127.0.0.1", "[::1]"].iter().any(|name| host.strip_prefix(name).is_some_and(is_port))
                })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins() {
        for origin in ["http://localhost", "https://127.0.0.1:8080", "http://[::1]:1"] {
            assert!(Cors::Localhost.allows(origin), "{origin}");
        }
        for origin in
            ["http://localhost.evil.com", "http://127.0.0.1.x", "ftp://localhost", "http://localhost:", "null"]
        {
            assert!(!Cors::Localhost.allows(origin), "{origin}");
        }
        assert!(Cors::Any.allows("http://anything"));
    }

    #[test]
    fn hosts() {
        let hosts = Hosts::Local(vec!["box.lan".to_owned()]);
        let own = "localhost LOCALHOST:8080 localhost.:1 app.localhost 127.0.0.1:80 192.168.0.1 [::1]:8080 Box.LAN:1";
        own.split(' ').for_each(|host| assert!(hosts.allow(host), "{host}"));
        let foreign = "evil.example:8080 localhost.evil.example notlocalhost 127.0.0.1.evil.example 0x7f.1 \
                       a@evil.example [::1 ? xbox.lan ::1";
        foreign.split(' ').chain([""]).for_each(|host| assert!(!hosts.allow(host), "{host}"));
        assert!(Hosts::Any.allow("evil.example"));
    }
}
