//! The pages of `docs/`, whose Rust blocks are compiled and run as tests of this package, which depends on all that they use.

macro_rules! pages {
    ($($name:ident)*) => {
        $(
            #[doc = include_str!(concat!("../../docs/", stringify!($name), ".md"))]
            mod $name {}
        )*
    };
}

pages! {
    architecture
    cogvideox
    from_accelerate
    from_deepspeed
    from_fsdp
    introduction
    launch
    llama
    machines
    own_backend
    own_strategy
    quick_start
    strategies
    troubleshooting
}
