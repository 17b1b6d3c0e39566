//! Fully sharded data parallelism: what code and environment say of it together.

use super::given::Origin;
use super::variables::Environment;
use super::{ProgramSettings, Sharding};
use crate::deepspeed::MixedPrecision;
use crate::environment as variable;
use crate::{Error, Result};
use candle_core::DType;
use sconce_fsdp::{
    AutoWrapPolicy, FullySharded, FullyShardedOptions, IgnoredModules, MIN_NUM_PARAMS, Named, ReshardAfterForward,
    WrapPolicy,
};
use sconce_zero::Tier;

/// Reads the variables that count where `ACCELERATE_USE_FSDP` is true; `None` where it is not.
pub(super) fn read(environment: &Environment<'_>) -> Result<Option<FullyShardedOptions>> {
    let flag = |name| environment.flag(name);
    if flag(variable::ACCELERATE_USE_FSDP)? != Some(true) {
        return Ok(None);
    }
    let reshard_after_forward = environment.value(
        variable::FSDP_RESHARD_AFTER_FORWARD,
        &ReshardAfterForward::expected(),
        ReshardAfterForward::from_name,
    )?;
    if flag(variable::FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD)? == Some(true) {
        let expected = "expected false: what units keep for the backward stays where they compute";
        return Err(Origin::Variable(variable::FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD).refuse(true, expected));
    }
    Ok(Some(FullyShardedOptions {
        version: named(environment, variable::FSDP_VERSION)?,
        sharding_strategy: named(environment, variable::FSDP_SHARDING_STRATEGY)?,
        reshard_after_forward,
        auto_wrap_policy: wrap_policy(environment)?,
        ignored_modules: ignored_modules(environment)?,
        backward_prefetch: named(environment, variable::FSDP_BACKWARD_PREFETCH)?,
        forward_prefetch: flag(variable::FSDP_FORWARD_PREFETCH)?,
        offload_params: flag(variable::FSDP_OFFLOAD_PARAMS)?,
        activation_checkpointing: flag(variable::FSDP_ACTIVATION_CHECKPOINTING)?,
        state_dict_type: named(environment, variable::FSDP_STATE_DICT_TYPE)?,
        use_orig_params: flag(variable::FSDP_USE_ORIG_PARAMS)?,
        sync_module_states: flag(variable::FSDP_SYNC_MODULE_STATES)?,
        cpu_ram_efficient_loading: flag(variable::FSDP_CPU_RAM_EFFICIENT_LOADING)?,
        ..FullyShardedOptions::default()
    }))
}

/// Makes the run of what code says, else the variables; `None` where nobody asks for FSDP.
pub(super) fn resolve(
    program: &ProgramSettings,
    strategy: Option<&str>,
    variables: Option<FullyShardedOptions>,
    has_deepspeed_variable: bool,
) -> Result<Option<FullySharded>> {
    let by_code = program.fully_sharded.clone();
    let first = match (&by_code, &variables) {
        (Some(_), _) => "AcceleratorBuilder::fully_sharded",
        (None, Some(_)) => variable::ACCELERATE_USE_FSDP,
        (None, None) => return Ok(None),
    };
    let second = match (&program.deepspeed, has_deepspeed_variable) {
        _ if by_code.is_some() && strategy.is_some() => Some("AcceleratorBuilder::strategy"),
        (Some(_), _) => Some("AcceleratorBuilder::deepspeed"),
        (None, true) => Some(variable::ACCELERATE_USE_DEEPSPEED),
        (None, false) => None,
    };
    if let Some(second) = second {
        return Err(Error::Exclusive { first, second });
    }
    let mut options = by_code.unwrap_or_default().or(variables.unwrap_or_default());
    options.sync_each_batch = options.sync_each_batch.or(program.sync_each_batch);
    let run = options.resolve()?;
    if let (Some(of_policy), Some(of_program)) = (precision(&run), program.mixed_precision)
        && of_policy != of_program.base()
    {
        let expected = format!("the precision policy's param_dtype is {of_policy}; leave out one of the two");
        return Err(Origin::Code("mixed_precision").refuse(of_program, expected));
    }
    Ok(Some(run))
}

/// Returns the precision that a policy asks for.
pub(super) fn precision(run: &FullySharded) -> Option<MixedPrecision> {
    run.precision.param_dtype.map(|dtype| match dtype {
        DType::BF16 => MixedPrecision::Bf16,
        DType::F16 => MixedPrecision::Fp16,
        _ => MixedPrecision::No,
    })
}

/// Returns where state lives.
pub(super) fn sharding(run: &FullySharded) -> Sharding {
    let tier = if run.offload_params { Tier::Host } else { Tier::Device };
    Sharding::FullySharded {
        strategy: run.strategy,
        parameters: tier,
        optimizer_state: tier,
    }
}

/// Reads the policy of three variables. Accelerate's launcher always gives the size, so that it may stand alone.
fn wrap_policy(environment: &Environment<'_>) -> Result<Option<WrapPolicy>> {
    let policy = named(environment, variable::FSDP_AUTO_WRAP_POLICY)?;
    let classes = environment.text(variable::FSDP_TRANSFORMER_CLS_TO_WRAP);
    let elements = environment.above_zero(variable::FSDP_MIN_NUM_PARAMS)?;
    if let Some(classes) = &classes
        && policy != Some(AutoWrapPolicy::TransformerBased)
    {
        let expected = format!(
            "classes are looked at with {}=TRANSFORMER_BASED_WRAP only, and it is {}",
            variable::FSDP_AUTO_WRAP_POLICY,
            policy.map_or("not set", Named::name)
        );
        return Err(Origin::Variable(variable::FSDP_TRANSFORMER_CLS_TO_WRAP).refuse(classes, expected));
    }
    Ok(policy.map(|policy| match policy {
        AutoWrapPolicy::TransformerBased => {
            let classes = classes.as_deref().unwrap_or_default().split(',').map(str::trim);
            WrapPolicy::transformer_based(classes.filter(|class| !class.is_empty()))
        }
        AutoWrapPolicy::SizeBased => WrapPolicy::SizeBased {
            min_num_params: elements.map_or(MIN_NUM_PARAMS, super::resolve::count),
        },
        AutoWrapPolicy::NoWrap => WrapPolicy::NoWrap,
    }))
}

fn ignored_modules(environment: &Environment<'_>) -> Result<Option<IgnoredModules>> {
    let Some(pattern) = environment.text(variable::FSDP_IGNORED_MODULES) else {
        return Ok(None);
    };
    IgnoredModules::new(&pattern).map(Some).map_err(|error| match error {
        sconce_fsdp::Error::Setting { value, expected, .. } => {
            Origin::Variable(variable::FSDP_IGNORED_MODULES).refuse(value, expected)
        }
        error => error.into(),
    })
}

fn named<T: Named>(environment: &Environment<'_>, name: &'static str) -> Result<Option<T>> {
    environment.value(name, &T::expected(), T::from_name)
}
